"""What runs: communicators, conversions and lowerings over them, the simulator, the sharded module."""
