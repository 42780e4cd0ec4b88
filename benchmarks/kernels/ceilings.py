"""What the device can do: copy bandwidth and a large matrix product, measured in the same run as everything else."""

from __future__ import annotations

import torch

from benchmarks.kernels.measure import Session


def run(session: Session) -> None:
    """Fill `session.ceilings`: copy_bytes_per_s and matmul_flops_per_s. Raises RuntimeError where one cannot run."""
    size = 1 << (22 if session.quick else 30)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    n = 256 if session.quick else 8192
    a, b = (torch.randn(n, n, device=session.device, dtype=session.dtype) for _ in range(2))
    copy = session.measure(
        "ceilings", "copy", "torch", lambda: [lambda: target.copy_(source)], ours=True, bytes_moved=2 * size
    )
    matmul = session.measure(
        "ceilings", f"matmul {n}^3, {session.dtype}", "torch", lambda: [lambda: a @ b], ours=True, flops=2.0 * n**3
    )
    for record in (copy, matmul):
        if "seconds" not in record:
            raise RuntimeError(f"the ceiling {record['case']!r} was not measured: {record}")
    session.ceilings = {
        "copy_bytes_per_s": copy["bytes"] / copy["seconds"],
        "matmul_flops_per_s": matmul["flops"] / matmul["seconds"],
    }
