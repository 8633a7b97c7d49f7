"""What costs most of a request in Python, in C where it was built: a call for each header line and each part
of a worker's answer, a look at each quote of a long body, objects that nearly always begin alike. May import
nothing.
"""
