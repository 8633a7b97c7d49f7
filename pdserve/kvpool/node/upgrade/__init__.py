"""How a running node is replaced by a new version of its program, with all pages kept (`pdserve pool upgrade`).

May import `core`, and of the node `config`, `memory` and `serving`.
"""
