"""Storage below the pool's memory: SSD, mounted directories, and whatever else is installed."""
