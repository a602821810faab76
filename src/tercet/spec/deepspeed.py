"""DeepSpeed's limits as its configuration is written (engine/deepspeed/config.py) and its memory planned."""

from __future__ import annotations

LARGEST_BUCKET = 200_000_000  # elements; DeepSpeed's own 5e8 takes 2 GB of a 24 GB card for each fp32 bucket
# Elements: under stage 3 a weight stays whole until so many others have been used (DeepSpeed's own default).
LIVE = 1_000_000_000
# Whole weights that a rank reads from files at once: one module's, and what lies between two.
NVME_WEIGHT_BUFFERS = 8
