"""Sums see what stands at another place, and are the same wherever a tensor lies."""

from __future__ import annotations

import pytest
import torch

from ctpo_megatron.engines.weights.checksums import Checksums, checksum, different

MATRIX = torch.randn(400, 640, generator=torch.Generator().manual_seed(0))
"""More than one block of a CPU, and more than whole rows of words."""
MATRIX[0, 0] = 0.0


def changed(what: str) -> torch.Tensor:
    matrix = MATRIX.clone()
    match what:
        case "a bit":
            matrix.view(torch.int32)[77, 131] ^= 1
        case "the last bit":
            matrix.view(torch.int32)[-1, -1] ^= 1 << 31
        case "two rows":
            matrix[[5, 6]] = matrix[[6, 5]]
        case "two columns":
            matrix[:, [5, 6]] = matrix[:, [6, 5]]
        case "two shards":
            matrix = torch.cat([matrix[200:], matrix[:200]])
        case "two rows of words":
            flat, width = matrix.view(-1), 2 * 1024
            flat[: 2 * width] = MATRIX.view(-1)[: 2 * width].view(2, width).flip(0).flatten()
        case "two numbers":
            matrix[3, 4], matrix[8, 9] = MATRIX[8, 9], MATRIX[3, 4]
        case "a sign of zero":
            matrix[0, 0] = -0.0
    return matrix


CHANGES = ("a bit", "the last bit", "two rows", "two rows of words", "two columns", "two shards", "two numbers")


@pytest.mark.parametrize("what", [*CHANGES, "a sign of zero"])
def test_what_is_seen(what: str) -> None:
    assert int(checksum(changed(what))) != int(checksum(MATRIX))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_number_counts(dtype: torch.dtype) -> None:
    matrix = MATRIX[1:7, :9].to(dtype)
    right = int(checksum(matrix))
    for place in range(matrix.numel()):
        wrong = matrix.clone()
        wrong.view(-1)[place] *= 2
        assert int(checksum(wrong)) != right


def test_a_tensor_has_one_sum_wherever_it_lies() -> None:
    """Aligned or not, contiguous or not, of any number of dimensions."""
    for tensor in (MATRIX, MATRIX.bfloat16(), MATRIX[:7, :3].bfloat16(), torch.tensor(2.0), torch.zeros(0, 4)):
        moved = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)[3:].view(tensor.shape)
        moved.copy_(tensor)
        sums = {int(checksum(each)) for each in (tensor, moved, moved.reshape(-1))}
        assert len(sums) == 1
        if tensor.dim() == 2:
            assert int(checksum(tensor.T.contiguous().T)) in sums


def test_names_that_one_side_lacks_and_sums_that_differ_are_named() -> None:
    sent, received = Checksums(), Checksums()
    for checksums, names in ((sent, "abc"), (received, "bcd")):
        assert [name for name, _ in checksums.watch((name, MATRIX) for name in names)] == [*names]
    assert sent.sums()["a"][0] == MATRIX.nbytes
    assert different(sent.sums(), sent.sums()) == [] and different(sent.sums(), received.sums()) == ["a", "d"]
    received.add("a", changed("a bit"))
    assert different(sent.sums(), received.sums()) == ["a", "d"]
    with pytest.raises(ValueError, match="a came twice"):
        received.add("a", MATRIX)
