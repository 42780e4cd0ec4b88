"""Weights on their way from the trainer to the engines: the protocol of transports, and both ends of each."""

from ctpo_megatron.engines.weights.offer import (
    EngineFacts,
    OffersWeights,
    Ranks,
    TransportSettings,
    WeightOffer,
    WeightSource,
    WeightTransport,
    init_request,
    open_transport,
    update_request,
)

__all__ = [
    "EngineFacts",
    "OffersWeights",
    "Ranks",
    "TransportSettings",
    "WeightOffer",
    "WeightSource",
    "WeightTransport",
    "init_request",
    "open_transport",
    "update_request",
]
