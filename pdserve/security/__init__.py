"""What keeps strangers out and secrets in: tokens, TLS contexts, private directories, limits of connections and
of failed logins, and text of others in logs.

May import: pdserve.errors.
"""
