"""`python -m ctpo_sandbox.server`."""

import sys

from ctpo_sandbox.server.main import main

sys.exit(main())
