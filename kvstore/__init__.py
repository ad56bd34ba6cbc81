"""Which bytes exist and who holds them: the arena, the block pool, the directory, and the daemon that serves them."""
