"""How a new version of the program replaces a running node, with all pages kept (`pdserve pool upgrade`).

May import `core`, and of the node `config`, `memory` and `serving`.
"""
