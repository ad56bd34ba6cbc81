"""``python -m kvferry.cli``: how ``kvferry up`` starts its processes, whatever PATH says."""

import sys

from kvferry.cli import main

sys.exit(main())
