"""The commands of `pdserve bench`, a module each. What they measure with is imported when they run."""
