"""Every constant of time of the checks, in seconds."""

GPU_QUERY_TIMEOUT_S = 30.0  # one call of nvidia-smi
NCCL_QUERY_TIMEOUT_S = 30.0  # to load NCCL from a slow disk and ask for its version
CONNECT_TIMEOUT_S = 5.0  # to open a connection to a server that the run uses
SANDBOX_START_TIMEOUT_S = 60.0  # for a sandbox to start and test its isolation
IMPORT_TIMEOUT_S = 300.0  # to import all packages, in a process that has read none of them
MEET_TIMEOUT_S = 120.0  # for ranks to connect and exchange tensors
FINDINGS_TIMEOUT_S = IMPORT_TIMEOUT_S + MEET_TIMEOUT_S  # for the findings of another node of a job
FIRST_CALL_TIMEOUT_S = 15.0  # for the sandbox to run an example call of the parser
LEAVE_TIMEOUT_S = 20.0  # for the other ranks of a job to read the verdict from rank 0
TOKENIZER_TIMEOUT_S = 120.0  # for a process to import transformers and read a tokenizer; it takes a few seconds
