"""`python -m agentgrpo` is the command `agentgrpo`."""

import sys

from agentgrpo.cli import main

sys.exit(main())
