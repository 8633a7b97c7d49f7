"""Complete examples of the pages in docs/extending. They import pdserve, and the tests run them."""
