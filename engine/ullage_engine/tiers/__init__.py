"""Memory below the block pool: pinned or plain host memory, and optionally a bounded folder on a disk."""
