"""Configuration files and command lines, made from configuration structs; and what packages add to pdserve.

Each part of pdserve declares its own structs; none of them belongs here. May import: errors.
"""
