"""Plan: memory, disk and batches that follow from a configuration, before anything starts. No torch."""

from ctpo_megatron.plan.choice import Candidate, choice_table, choices, settled, settled_as_before
from ctpo_megatron.plan.disk import (
    DiskNeeds,
    DiskUse,
    check_disk,
    crash_line,
    disk_needs,
    disk_problem,
    disk_table,
    disk_use,
    evaluations,
)
from ctpo_megatron.plan.gpus import ASLEEP, GpuMemory, TransferMemory, check_gpu_memory
from ctpo_megatron.plan.host import host_parts, host_table
from ctpo_megatron.plan.memory import (
    CARD_GIB,
    DEFAULT_CHUNK,
    ELEMENT_BYTES,
    GIB,
    GPU_GIB,
    USUAL_CARD,
    CpuCache,
    Memory,
    Split,
    TableRow,
    check_cache,
    chunk_rows,
    free_memory,
    gib,
    head_chunk_rows,
    in_flight,
    layer_activations,
    memory_table,
    model_parameters,
    peak_memory,
    repeated_token_share,
    rows_within,
    stage_memory,
    stage_parameters,
)
