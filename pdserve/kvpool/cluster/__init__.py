"""The pool as a whole: its members, the owner of each page, failure detection, the plan for moving pages.

Pure. May import: protocol, namespaces.
"""
