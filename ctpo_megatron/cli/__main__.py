"""`python -m ctpo_megatron.cli VERB ...`, as torchrun starts it."""

import sys

from ctpo_megatron.cli import main

sys.exit(main())
