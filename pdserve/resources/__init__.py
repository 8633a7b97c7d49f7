"""What this host has: its GPUs, its memory as the container's limits leave it, and how workers share both."""
