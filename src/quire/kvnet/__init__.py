"""KV blocks between engines: blocks for peers, blocks of peers, and events that tell of blocks that come and go."""
