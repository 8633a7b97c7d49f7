"""The life of the router's processes: one alone, or a parent and several children behind one port.

May import every other folder of the router.
"""
