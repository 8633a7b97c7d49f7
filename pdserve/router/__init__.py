"""Router: one OpenAI endpoint in front of prefill and decode workers."""
