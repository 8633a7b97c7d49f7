"""Configuration files and command lines, made from configuration structs; what packages add by entry points.

Each part of pdserve declares its own structs; none of them belongs here. May import: errors.
"""
