"""What is done for a request: understand, admit, settle, place, prefill, stream, recover, account.

`handle` is the table of contents. May import every folder of the router but `admin`, `app` and `processes`.
"""
