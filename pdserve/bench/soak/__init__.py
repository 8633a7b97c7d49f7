"""`pdserve bench soak`: steady load for as long as one likes, and what grows under it (R16)."""
