"""Public functions of TensorFlow and Keras, each called eagerly and followed.

`names` lists them, `inputs` finds what to call them with by their signatures, `by_hand` says it where no signature
does, and `calls` compares.
"""
