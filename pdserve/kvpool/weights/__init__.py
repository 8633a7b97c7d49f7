"""Models' weights in the pool: pages named by content, a manifest for each revision, and reading them back.

    names, manifest, tensors            names, records, where files are cut, headers        (pure)
    place, store                        which pool; the namespaces of weights, and their pages
    push, catalog                       writing a revision; listing, warming and removing them
    reading, buffers                    verified pages; the memory that they are read to
    streaming, files                    tensors with read-ahead; small files in a directory
    cli                                 `pdserve weights`

May import: client, and of admin the connection for questions to nodes. No torch: tensors are bytes here.
"""
