"""Weights on their way from the trainer to the engines: two methods a transport, and both ends of each."""

from ctpo_megatron.engines.weights.transport import (
    EngineFacts,
    Manifest,
    SendsWeights,
    TransportSettings,
    WeightTransport,
    open_transport,
)
