"""`pdserve doctor`: is this installation, or this cluster, as it should be? Facts are gathered at the edge
(`machine`, `cluster`, `probe`) and judged by pure functions (`judge`).
"""
