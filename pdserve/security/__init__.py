"""Tokens and secrets, TLS contexts, private directories, limits of connections and of failed logins, and the
text of others in logs.

May import: pdserve.errors.
"""
