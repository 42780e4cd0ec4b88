"""Weights on their way from the trainer to the engines: the protocol of transports, and both ends of one."""

from ctpo_megatron.weights.transport import RankZeroTransport, WeightReceiver, WeightSource, WeightTransport

__all__ = ["RankZeroTransport", "WeightReceiver", "WeightSource", "WeightTransport"]
