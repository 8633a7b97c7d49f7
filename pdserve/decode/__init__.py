"""The decode and aggregated workers: pull pages, stream the answer, follow the write-back of conversations.

May import: prefill, engine, kvpool.client, and what lies below.
"""
