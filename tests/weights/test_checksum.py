"""Checksums add up over shards, and see what stands at another place."""

from __future__ import annotations

import pytest
import torch

from ctpo_megatron.engines.weights.checksums import (
    SAMPLED,
    Checksums,
    Part,
    checksum,
    differences,
    sampled_checksum,
    sampled_columns,
    total_of,
)

MATRIX = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))


def parts_of(matrix: torch.Tensor, rows: int, columns: int) -> list[Part]:
    return [
        Part("w", "", False, int(checksum(matrix[r : r + rows, c : c + columns], r, c)))
        for r in range(0, matrix.shape[0], rows)
        for c in range(0, matrix.shape[1], columns)
    ]


def sums_of(matrix: torch.Tensor, dtype: torch.dtype, version: int = 3) -> dict[str, tuple[int, int]]:
    checksums = Checksums(version, dtype)
    assert [name for name, _ in checksums.watch([("w", matrix)])] == ["w"]
    return checksums.sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_add_up_in_the_engines_precision(dtype: torch.dtype) -> None:
    """Whatever the cut, and though the trainer's numbers are float32."""
    sums = sums_of(MATRIX, dtype)
    for cut in ((130, 200), (13, 200), (130, 50), (26, 25)):
        assert differences(parts_of(MATRIX.to(dtype), *cut), sums) == ([], [])
    assert differences([], sums) == ([], ["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_ranks_add_up(dtype: torch.dtype) -> None:
    for tensor in (MATRIX, MATRIX[:, 0], MATRIX.view(130, 10, 20)):
        of_ranks = [Checksums(3, dtype) for _ in range(3)]
        for checksums, first, end in zip(of_ranks, (0, 7, 100), (7, 100, 130), strict=True):
            checksums.add("w", tensor[first:end], row=first)
        assert total_of(checksums.sums for checksums in of_ranks) == sums_of(tensor, dtype)


def changed(what: str) -> torch.Tensor:
    matrix = MATRIX.clone()
    match what:
        case "a bit":
            matrix.view(torch.int32)[77, 131] ^= 1
        case "two rows":
            matrix[[5, 6]] = matrix[[6, 5]]
        case "two columns":
            matrix[:, [5, 6]] = matrix[:, [6, 5]]
        case "two shards":
            matrix = torch.cat([matrix[65:], matrix[:65]])
        case "two numbers":
            matrix[3, 4], matrix[8, 9] = MATRIX[8, 9], MATRIX[3, 4]
    return matrix


@pytest.mark.parametrize("what", ["a bit", "two rows", "two columns", "two shards", "two numbers"])
def test_what_is_seen(what: str) -> None:
    assert differences(parts_of(changed(what), 13, 50), sums_of(MATRIX, torch.float32)) == (["w"], [])


def test_a_part_of_another_copy_does_not_make_up_for_a_wrong_one() -> None:
    right, wrong = int(checksum(MATRIX)), int(checksum(changed("two rows")))
    sums = sums_of(MATRIX, torch.float32)
    assert differences([Part("w", "0", False, right), Part("w", "1", False, right)], sums) == ([], [])
    assert differences([Part("w", "0", False, right), Part("w", "1", False, wrong)], sums) == (["w"], [])
    assert differences([Part("other", "", False, right)], sums) == (["other"], ["w"])


def test_a_version_looks_at_columns_of_all_parts() -> None:
    for version in range(20):
        columns = sampled_columns(version, 1000)
        assert len(columns.unique()) == SAMPLED and int(columns.diff().max()) < 2 * 1000 / SAMPLED + 1
    assert not torch.equal(sampled_columns(1, 1000), sampled_columns(2, 1000))
    assert sampled_columns(1, 5).tolist() == [0, 1, 2, 3, 4]
    columns = sampled_columns(3, 200)
    part = Part("w", "", True, int(sampled_checksum(MATRIX[:, columns], columns)))
    assert differences([part], sums_of(MATRIX, torch.float32)) == ([], [])


def test_zeros_have_no_sign_where_a_layer_multiplies() -> None:
    columns = torch.arange(2)
    zeros, other = torch.tensor([[0.0, -0.0]]), torch.tensor([[-0.0, 0.0]])
    assert int(sampled_checksum(zeros, columns)) == int(sampled_checksum(other, columns)) == 0
    assert int(checksum(zeros)) != int(checksum(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_number_counts(dtype: torch.dtype) -> None:
    """In the whole sum and in that of some columns; a doubled one has another exponent, and only one bit is another."""
    matrix, columns = MATRIX[:6, :9].to(dtype), torch.arange(9)
    right = int(checksum(matrix)), int(sampled_checksum(matrix, columns))
    for place in range(matrix.numel()):
        wrong = matrix.clone()
        wrong.view(-1)[place] *= 2
        assert int(checksum(wrong)) != right[0] and int(sampled_checksum(wrong, columns)) != right[1]


def test_a_tensor_is_copied_as_it_is_summed() -> None:
    for tensor in (MATRIX, MATRIX.T, MATRIX.bfloat16()[:, :33], torch.randn(700, 700), torch.tensor(2.0)):
        into = torch.empty(tensor.shape, dtype=tensor.dtype)
        checksums = Checksums(3, torch.float32)
        checksums.add("w", tensor, into)
        assert torch.equal(into, tensor) and checksums.sums == sums_of(tensor, torch.float32)


def test_vectors_scalars_and_tensors_of_three_dimensions() -> None:
    for tensor in (torch.randn(7), torch.tensor(2.0), torch.randn(3, 4, 5), torch.zeros(0, 4)):
        (total, _) = sums_of(tensor, torch.float32)["w"]
        assert (total == 0) == (tensor.numel() == 0)
