"""Weights on their way from the trainer to the engines: the protocol of transports, and both ends of each."""

from ctpo_megatron.engines.weights.offer import (
    EngineFacts,
    EngineFleet,
    EngineWeights,
    FileTransport,
    Ranks,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)

__all__ = [
    "EngineFacts",
    "EngineFleet",
    "EngineWeights",
    "FileTransport",
    "Ranks",
    "WeightReceiver",
    "WeightSource",
    "WeightTransport",
]
