"""How a spec becomes an assembly, in the order of :func:`moefw.compose.resolve.assemble_tree`.

``problems`` collects what is wrong, and asks plugins, which may raise. ``chosen`` has the parts that a spec names;
``choosing`` loads them and reads their options. ``checks`` are of what several sections say together. ``matching``
finds the facts that meet the offers and needs of all parts, at each layer.
"""
