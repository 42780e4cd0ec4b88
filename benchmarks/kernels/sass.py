"""What a compiled kernel executes: instructions and loops of its machine code, order of memory accesses in its PTX."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile

_LABEL = re.compile(r"\s*(\.L\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)")
_JUMP = re.compile(r"\bBRA[\w.]*\s.*`\((\.L\w+)\)")


@dataclasses.dataclass(frozen=True)
class Program:
    """length: instructions, without padding. loops: length of each loop, the longest first."""

    length: int
    loops: tuple[int, ...]


def disassemble(cubin: bytes) -> Program:
    """Machine code as `nvdisasm` of Triton's wheel shows it; subprocess.CalledProcessError where it cannot."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        shown = subprocess.run([tool, "--print-code", file.name], capture_output=True, text=True, check=True).stdout
    return parse(shown)


def parse(text: str) -> Program:
    """A loop is what lies between a jump backwards and its label; a jump to itself, which ends the code, is none."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction.group(1))
    while code and code[-1].startswith("NOP"):
        code.pop()
    jumps = [(i, labels.get(jump.group(1), i)) for i, line in enumerate(code) if (jump := _JUMP.search(line))]
    return Program(len(code), tuple(sorted((i - to + 1 for i, to in jumps if to < i), reverse=True)))


def writes_before_all_is_read(ptx: str) -> bool:
    """Whether a thread may write global memory while another still reads what the same step of a loop needs.

    In every basic block that reads and writes, a barrier has to stand between the last load and the first store.
    True, too, where no block does both: then this is not the loop that was meant.
    """
    steps = [block for block in re.split(r"\$L__BB\w+:", ptx) if "ld.global" in block and "st.global" in block]
    return not steps or any("bar.sync" not in _between(step) for step in steps)


def _between(step: str) -> str:
    return step[step.rindex("ld.global") : step.index("st.global")]
