"""How a process goes on as the version that is installed now, without an end: by a command of its own
program, which waits until that is done. May import nothing of `up`.
"""
