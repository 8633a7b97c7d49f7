"""Several router processes as one router: who starts and replaces them, and what they tell each other.

May import every other folder of the router.
"""
