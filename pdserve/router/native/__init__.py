"""What costs most of a request in Python, in C where it was built: a call for each header line, and a look at
each quote of a long body. May import nothing.
"""
