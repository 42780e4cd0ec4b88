"""The reference: transformers in float64, one sequence at a time, and the plain objective. No Megatron, no kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from ctpo_megatron.config import read_spec
from ctpo_megatron.data import Trajectory
from ctpo_megatron.data.tokens import ROUTER_CHOICES, further, recorded
from ctpo_megatron.models import ModelFamily
from ctpo_megatron.objective import Advantage, PolicyObjective, policy_loss, summarize
from ctpo_megatron.verify.batch import of_tokens


@contextmanager
def imposed_experts(trajectory: Trajectory) -> Iterator[None]:
    """Within it, a forward pass over the tokens of a trajectory sends them to the experts that it has recorded, if any.

    Raises RuntimeError unless the model called `torch.topk` once in each layer.
    """
    choices = further(trajectory.tokens).get(ROUTER_CHOICES)
    if choices is None:
        yield
        return
    imposed = _Imposed(torch.from_numpy(choices.astype("int64")), torch.from_numpy(recorded(choices)))
    with imposed:
        yield
    if imposed.layer != choices.shape[1]:
        raise RuntimeError(f"{imposed.layer} routers of the model in transformers chose experts by torch.topk")


class _Imposed(TorchFunctionMode):
    """experts: `[T, layers, choices]`; known: bool `[T]`. Routers are called layer by layer."""

    def __init__(self, experts: Tensor, known: Tensor) -> None:
        super().__init__()
        self._experts, self._known, self.layer = experts, known, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return found
        experts = torch.where(self._known[:, None], self._experts[:, self.layer], found.indices)
        self.layer += 1
        return args[0].gather(1, experts), experts


SampleKey = tuple[str, int]


@dataclass(frozen=True)
class Oracle:
    """loss by objective; log_probs: float64 `[T]` by (prompt id, sample index), 0 where the policy did not sample.

    gradient: float64 by objective and Hugging Face name.
    """

    log_probs: dict[SampleKey, Tensor]
    loss: dict[str, float]
    gradient: dict[str, dict[str, Tensor]]

    def __or__(self, other: Oracle) -> Oracle:
        """Of the objectives of both."""
        return Oracle(self.log_probs | other.log_probs, self.loss | other.loss, self.gradient | other.gradient)


class Reference:
    """The model in float64."""

    def __init__(self, directory: Path, temperature: float, family: ModelFamily | None = None) -> None:
        # Only the eager implementation of experts multiplies in float64 everywhere.
        options = {"experts_implementation": "eager"} if read_spec(directory, family).num_experts else {}
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **options)
        # transformers drops the gradient of the padding token's embedding, which is needed when the token is in a
        # sequence.
        self._model.get_input_embeddings().padding_idx = None
        self._temperature = temperature

    def rows(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (nats), `[T]` each, differentiable; 0 where the policy did not sample."""
        ids = torch.tensor(trajectory.token_ids.copy())
        with imposed_experts(trajectory):
            logits = self._model(ids[None]).logits[0, :-1] / self._temperature
        of_vocabulary, sampled = logits.log_softmax(-1), torch.tensor(trajectory.response_mask.copy())
        log_probs = of_vocabulary.gather(1, ids[1:, None]).squeeze(1)
        entropy = -(of_vocabulary.exp() * of_vocabulary).sum(-1)
        first = log_probs.new_zeros(1)  # which nothing predicts
        return torch.cat([first, log_probs]) * sampled, torch.cat([first, entropy]) * sampled

    def evaluate(
        self, batch: Sequence[Trajectory], advantages: Sequence[Advantage], objectives: dict[str, PolicyObjective]
    ) -> Oracle:
        """Loss and gradient of the batch as one optimizer step, with `rollout_log_probs` as the anchor.

        The loss is without an entropy bonus, as ranks report it; the gradient is with it.
        """
        rows, entropies = zip(*(self.rows(trajectory) for trajectory in batch), strict=True)
        lengths = torch.tensor([len(row) for row in rows])
        flat = torch.cat(rows)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

        def column(field: str) -> Tensor:
            return torch.tensor([value for trajectory in batch for value in getattr(trajectory, field)]).double()

        loss: dict[str, float] = {}
        gradient: dict[str, dict[str, Tensor]] = {}
        for name, objective in objectives.items():
            out = policy_loss(
                flat,
                column("rollout_log_probs").float().double(),  # as stored in batches
                torch.from_numpy(of_tokens(batch, advantages)).double(),
                column("response_mask"),
                objective,
                loss_mask=column("loss_mask"),
                cu_seqlens=cu_seqlens,
                entropy=torch.cat(entropies),
                turn=column("turn").to(torch.int64),
            )
            names, parameters = zip(*self._model.named_parameters(), strict=True)
            found = torch.autograd.grad(out.loss, parameters, retain_graph=True)
            loss[name] = summarize(out.stats)["actor/pg_loss"]
            gradient[name] = {}
            for parameter_name, tensor in zip(names, found, strict=True):
                gradient[name] |= dict(_saved(parameter_name, tensor))
        keys = [(trajectory.prompt_id, trajectory.sample_index) for trajectory in batch]
        return Oracle({key: row.detach() for key, row in zip(keys, rows, strict=True)}, loss, gradient)


def _saved(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its names in a file: transformers stores the experts of a layer in one tensor."""
    prefix, found, matrix = name.rpartition("mlp.experts.")
    if not found:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        parts = part.chunk(2) if matrix == "gate_up_proj" else [part]
        names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        yield from ((f"{prefix}mlp.experts.{expert}.{n}.weight", p) for n, p in zip(names, parts, strict=True))
