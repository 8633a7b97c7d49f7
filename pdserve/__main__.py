"""`python -m pdserve`: the same as `pdserve`.

SGLang spawns its children, and spawn imports the parent's main module again under the name `__mp_main__`:
nothing heavy, and nothing with effects, may stand outside the guard.
"""

if __name__ == "__main__":
    from pdserve.cli import main

    main()
