"""What prediction, data and computation of the loss have in common."""

from __future__ import annotations

IGNORED = -100  # a label that is not trained; torch's cross_entropy and transformers take the same
CHUNK_TOKENS = 512  # tokens whose logits exist at once; large enough to keep the matmul efficient
