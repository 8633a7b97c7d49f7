"""Parts of pdserve inside other stacks. Each imports its stack, which pdserve does not install."""
