"""SGLang processes: arguments, start, self-check, CPU support."""
