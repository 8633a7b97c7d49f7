"""TLS between the parts: contexts from files of certificates, and `pdserve cert`, which makes such files.

May import: pdserve.errors. Only `authority` needs the package `cryptography`.
"""
