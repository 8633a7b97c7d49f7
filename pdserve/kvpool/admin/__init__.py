"""The words of `pdserve pool`: each module has one, and `kvpool/cli.py` names them."""
