"""Calls that no signature tells of: a line a function, its arguments in terms of `Maker`; and what is left out."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.public.inputs import CallArguments

CALLS = """
tf.strings.format: "{} of {}", [f(2), w(3)]
tf.strings.to_number: s("1.5", "-2") if K else s("3", "4e2", "inf")
tf.io.decode_and_crop_jpeg: jpeg, [1, 1, 3, 2]
tf.io.decode_bmp: bmp
tf.io.decode_csv: s("1,2.5,a", "3,,b"), [[0], [0.5], [""]]
tf.io.decode_gif: gif
tf.io.decode_image: png
tf.io.decode_jpeg: jpeg
tf.io.decode_json_example: s('{"features": {"feature": {"a": {"int64List": {"value": ["%d"]}}}}}' % K)
tf.io.decode_png: png
tf.io.decode_raw: s("abcd", "efgh"), tf.uint8
tf.io.decode_compressed: t(compressed), "ZLIB"
tf.io.deserialize_many_sparse: tf.stack([tf.io.serialize_sparse(sp(3)) for _ in range(2)]), tf.float32
tf.io.extract_jpeg_shape: jpeg
tf.io.parse_example: [example(1), example(2 + K)], FEATURES
tf.io.parse_single_example: example(1 + K), FEATURES
tf.io.parse_sequence_example: [sequence(2), sequence(3)], None, SEQUENCE
tf.io.parse_single_sequence_example: sequence(2 + K), None, SEQUENCE
tf.io.parse_tensor: tf.io.serialize_tensor(tf.zeros(3) if K else f(2)), tf.float32
tf.io.read_file: file
tf.io.write_file: file, s("zeros\\0\\0")[0]
tf.io.gfile.exists: file
tf.io.gfile.glob: folder + "/*.txt"
tf.io.gfile.isdir: folder if K else file
tf.io.gfile.join: "a", "b", "c%d" % K
tf.io.gfile.listdir: folder
tf.io.gfile.get_registered_schemes:
tf.io.gfile.makedirs: folder + "/made%d" % K
tf.io.gfile.copy: file, folder + "/copy.txt", True
tf.io.gfile.walk: folder + "/walked"
tf.ragged.cross: [tf.ragged.constant([["a"], ["b", "c"]]), tf.ragged.constant([["d", "e"], ["%d" % K]])]
tf.ragged.cross_hashed: [tf.ragged.constant([["a"], ["b", "c"]]), tf.ragged.constant([["d", "e"], ["%d" % K]])]
tf.ragged.map_flat_values: tf.add, rg(), 0.5 + K
tf.ragged.stack_dynamic_partitions: f(4), w(4, high=2), 2
tf.ragged.stack: [rg(), rg()]
tf.sparse.concat: 0, [sp(2, 3), sp(1, 3)]
tf.sparse.cross: [s("a", "b")[:, None], w(2, 1)]
tf.sparse.cross_hashed: [s("a", "b")[:, None], w(2, 1)]
tf.sparse.fill_empty_rows: sp(4, 3), 0.5
tf.sparse.map_values: tf.multiply, sp(3, 2), 2.0
tf.sparse.mask: tf.IndexedSlices(f(3, 2), t([4, 1, 2])), [1 + K]
tf.sparse.reshape: sp(2, 6), [3, -1]
tf.sparse.retain: sp(3), t([True, False, True])
tf.sparse.segment_mean: f(4, 2), t([0, 2, 3]), t([0, 0, 1])
tf.sparse.segment_sqrt_n: f(4, 2), t([0, 2, 3]), t([0, 0, 1])
tf.sparse.segment_sum: f(4, 2), t([0, 2, 3]), t([0, 0, 1])
tf.sparse.slice: sp(3, 4), [1, 1], [2, 2]
tf.sparse.sparse_dense_matmul: sp(3, 4), f(4, 2)
tf.sparse.split: sp(2, 4), num_split=2, axis=1
tf.sparse.to_indicator: tf.sparse.from_dense(w(2, 3) + 1), 6
tf.sparse.sampled_addmm: t([[0, 1], [1, 0]], tf.int32), f(2), t([2, 2], tf.int32), f(2, 3), f(3, 2)
tf.sets.size: tf.sparse.from_dense(w(2, 3) + 1)
tf.image.combined_non_max_suppression: boxes(1, 6, 1), f(1, 6, 2), 2, 3
tf.image.crop_and_resize: f(2, 8, 8, 3), boxes(3), t([0, 1, 1]), [4, 4]
tf.image.draw_bounding_boxes: f(2, 8, 8, 3), boxes(2, 2), f(2, 3)
tf.image.extract_glimpse: f(2, 8, 8, 3), [4, 4], f(2, 2) - 0.5
tf.image.extract_patches: f(2, 8, 8, 3), [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
tf.image.grayscale_to_rgb: f(2, 4, 4, 1)
tf.image.non_max_suppression: boxes(6), f(6), 3
tf.image.non_max_suppression_overlaps: f(6, 6), f(6), 3
tf.image.non_max_suppression_padded: boxes(6), f(6), 3
tf.image.non_max_suppression_with_scores: boxes(6), f(6), 3
tf.image.pad_to_bounding_box: f(3, 4, 2), 1, 2, 6, 7
tf.image.random_jpeg_quality: f(8, 8, 3), 60, 90
tf.image.sample_distorted_bounding_box: t([8, 8, 3]), boxes(1, 2), seed=4
tf.image.ssim: f(2, 16, 16, 3), f(2, 16, 16, 3), 1.0
tf.image.ssim_multiscale: f(1, 176, 176, 1), f(1, 176, 176, 1), 1.0
tf.image.stateless_random_jpeg_quality: f(8, 8, 3), 60, 90, [3, 4 + K]
tf.image.stateless_random_saturation: f(8, 8, 3), 0.5, 1.5, [3, 4 + K]
tf.image.stateless_sample_distorted_bounding_box: t([8, 8, 3]), boxes(1, 2), [3, 4 + K]
tf.linalg.cholesky: f(3, 3) * 0.1 + 2.0 * tf.eye(3)
tf.linalg.diag: f(2, 3)
tf.linalg.eigh_tridiagonal: f(4), f(3)
tf.linalg.einsum: "ij,jk->ik", f(2, 3), f(3, 2 + K)
tf.linalg.lu_matrix_inverse: *tf.linalg.lu(f(3, 3) + 3 * tf.eye(3)),
tf.linalg.lu_reconstruct: *tf.linalg.lu(f(3, 3) + 3 * tf.eye(3)),
tf.linalg.lu_solve: *tf.linalg.lu(f(3, 3) + 3 * tf.eye(3)), f(3, 2)
tf.linalg.set_diag: f(3, 3), f(3)
tf.linalg.tensor_diag: f(3)
tf.linalg.experimental.conjugate_gradient: tf.linalg.LinearOperatorFullMatrix(4.0 * tf.eye(3), True, True, True), f(3)
tf.math.in_top_k: w(3), f(3, 4), 2
tf.math.invert_permutation: t([2, 0, 1] if K else [1, 0])
tf.nn.atrous_conv2d: f(1, 8, 8, 2), f(3, 3, 2, 4), 2, "SAME"
tf.nn.atrous_conv2d_transpose: f(1, 8, 8, 4), f(3, 3, 2, 4), [1, 8, 8, 2], 2, "SAME"
tf.nn.avg_pool: f(2, 8, 8, 3), 2, 2, "VALID"
tf.nn.avg_pool1d: f(2, 8, 3), 2, 2, "VALID"
tf.nn.avg_pool2d: f(2, 8, 8, 3), 2, 2, "SAME"
tf.nn.avg_pool3d: f(1, 4, 4, 4, 2), 2, 2, "VALID"
tf.nn.max_pool: f(2, 8, 8, 3), 2, 2, "VALID"
tf.nn.max_pool1d: f(2, 8, 3), 2, 2, "VALID"
tf.nn.max_pool2d: f(2, 8, 8, 3), 2, 2, "SAME"
tf.nn.max_pool3d: f(1, 4, 4, 4, 2), 2, 2, "VALID"
tf.nn.max_pool_with_argmax: f(2, 8, 8, 3), 2, 2, "SAME"
tf.nn.pool: f(2, 8, 8, 3), [2, 2], "AVG"
tf.nn.bias_add: f(2, 3), f(3)
tf.nn.collapse_repeated: w(2, 5), t([5, 3])
tf.nn.compute_accidental_hits: w(2, 1, dtype=np.int64), w(4, dtype=np.int64), 1
tf.nn.conv1d: f(2, 8, 3), f(3, 3, 4), 1, "SAME"
tf.nn.conv1d_transpose: f(2, 4, 3), f(3, 5, 3), [2, 8, 5], 2
tf.nn.conv2d: f(1 + K, 8, 8, 3), f(3, 3, 3, 4), 1, "SAME"
tf.nn.conv2d_transpose: f(1, 4, 4, 3), f(3, 3, 5, 3), [1, 8, 8, 5], 2
tf.nn.conv3d: f(1, 4, 4, 4, 2), f(2, 2, 2, 2, 3), [1, 1, 1, 1, 1], "SAME"
tf.nn.conv3d_transpose: f(1, 2, 2, 2, 2), f(2, 2, 2, 3, 2), [1, 4, 4, 4, 3], 2
tf.nn.conv_transpose: f(1, 4, 4, 3), f(3, 3, 5, 3), [1, 8, 8, 5], 2
tf.nn.convolution: f(1, 8, 8, 3), f(3, 3, 3, 4)
tf.nn.ctc_beam_search_decoder: f(5, 2, 4), t([5, 4]), 4
tf.nn.ctc_greedy_decoder: f(5, 2, 4), t([5, 4])
tf.nn.ctc_loss: w(2, 3) + 1, f(6, 2, 5), t([3, 2]), t([6, 5])
tf.nn.ctc_unique_labels: w(2, 4)
tf.nn.depthwise_conv2d: f(1, 8, 8, 3), f(3, 3, 3, 2), [1, 1, 1, 1], "SAME"
tf.nn.depthwise_conv2d_backprop_filter: f(1, 4, 4, 3), [3, 3, 3, 1], f(1, 4, 4, 3), [1, 1, 1, 1], "SAME"
tf.nn.depthwise_conv2d_backprop_input: [1, 4, 4, 3], f(3, 3, 3, 1), f(1, 4, 4, 3), [1, 1, 1, 1], "SAME"
tf.nn.dilation2d: f(1, 6, 6, 2), f(2, 2, 2), [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1]
tf.nn.erosion2d: f(1, 6, 6, 2), f(2, 2, 2), [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1]
tf.nn.embedding_lookup: f(5, 2), w(3)
tf.nn.embedding_lookup_sparse: f(5, 2), tf.sparse.from_dense(w(2, 3) + 1), None
tf.nn.safe_embedding_lookup_sparse: f(5, 2), tf.sparse.from_dense(w(2, 3))
tf.nn.fixed_unigram_candidate_sampler: w(2, 1, dtype=np.int64), 1, 3, True, 5, unigrams=[1., 2., 3., 2., 1.], seed=4
tf.nn.learned_unigram_candidate_sampler: w(2, 1, dtype=np.int64), 1, 3, True, 5, 4
tf.nn.all_candidate_sampler: w(2, 1, dtype=np.int64), 1, 5, True, 4
tf.nn.fractional_avg_pool: f(1, 8, 8, 2), [1.0, 1.5, 1.5, 1.0], seed=3 + K
tf.nn.fractional_max_pool: f(1, 8, 8, 2), [1.0, 1.5, 1.5, 1.0], seed=3 + K
tf.nn.nce_loss: f(8, 4), f(8), w(3, 1, dtype=np.int64), f(3, 4), 4, 8
tf.nn.sampled_softmax_loss: f(8, 4), f(8), w(3, 1, dtype=np.int64), f(3, 4), 4, 8, seed=3
tf.nn.separable_conv2d: f(1, 8, 8, 3), f(3, 3, 3, 2), f(1, 1, 6, 4), [1, 1, 1, 1], "SAME"
tf.nn.sigmoid_cross_entropy_with_logits: f(3), f(3)
tf.nn.space_to_batch: f(1, 4, 4, 2), [2, 2], [[0, 0], [0, 0]]
tf.nn.sparse_softmax_cross_entropy_with_logits: w(3), f(3, 4)
tf.nn.sufficient_statistics: f(3, 4), [0]
tf.nn.with_space_to_batch: f(1, 8, 8, 2), [2, 2], "VALID", lambda x, block, padding: x * 2.0, [1, 1]
tf.nn.experimental.general_dropout: f(4, 4), 0.5, uniform_sampler=tf.random.uniform
tf.random.log_uniform_candidate_sampler: w(2, 1, dtype=np.int64), 1, 3, True, 5, 4
tf.random.uniform_candidate_sampler: w(2, 1, dtype=np.int64), 1, 3, True, 5, 4
tf.random.experimental.index_shuffle: 2, (1, 2 + K), 9
tf.random.create_rng_state: 5 + K, "philox"
tf.random.set_seed: 5 + K
tf.random.set_global_generator: tf.random.Generator.from_seed(3)
tf.nest.map_structure: lambda a, b: a + b, {"x": f(2), "y": [f(3)]}, {"x": f(2), "y": [f(3)]}
tf.audio.decode_wav: tf.audio.encode_wav(f(100, 1), 8000)
tf.audio.encode_wav: f(100, 2), 8000
tf.debugging.assert_all_finite: f(3), "finite"
tf.debugging.assert_greater: f(3) + 2.0, f(3)
tf.debugging.assert_equal: w(3), 3 * K
tf.debugging.assert_rank: f(2, 3), 2 + K
tf.debugging.assert_rank_at_least: f(2, 3), 2 + K
tf.debugging.assert_near: t([1.0, 2.0]), t([1.0, 2.0 + K])
tf.debugging.assert_negative: f(3) - 2.0 + 2 * K
tf.debugging.assert_non_positive: f(3) - 2.0 + 2 * K
tf.debugging.assert_rank_in: f(2, 3), [1, 2 + K]
tf.debugging.assert_shapes: [(f(2, 3), ("a", "b")), (f(3), ("b",))]
tf.debugging.assert_type: f(3), tf.float32 if K else tf.int32
tf.debugging.check_numerics: f(3) / (f(3) * K), "numbers"
tf.quantization.quantized_concat: 0, [tf.cast(w(2), tf.quint8)] * 2, [t(0.0)] * 2, [t(1.0)] * 2
tf.experimental.numpy.einsum: "ij,jk->ik", f(2, 3), f(3, 2)
tf.experimental.numpy.issubdtype: np.float32, np.floating if K else np.integer
tf.experimental.numpy.pad: f(2, 3), [[1, 1], [0, 2]], "constant"
tf.experimental.numpy.promote_types: np.int32, np.float32 if K else np.int8
tf.experimental.numpy.reshape: f(2, 6), [3, 4] if K else [12]
tf.dtypes.as_dtype: "float32" if K else np.int8
tf.quantization.dequantize: tf.cast(w(4, high=99), tf.quint8), 0.0, 2.0 + K
tf.quantization.fake_quant_with_min_max_args: f(4)
tf.quantization.fake_quant_with_min_max_args_gradient: f(4), f(4)
tf.quantization.fake_quant_with_min_max_vars: f(4), 0.2, 0.8
tf.quantization.fake_quant_with_min_max_vars_gradient: f(4), f(4), 0.2, 0.8
tf.quantization.fake_quant_with_min_max_vars_per_channel: f(2, 3), t([0.0, 0.1, 0.2]), t([1.0, 0.7, 0.8])
tf.quantization.fake_quant_with_min_max_vars_per_channel_gradient: f(2, 3), f(2, 3), t([0., .1, .2]), t([1., .7, .8])
tf.quantization.quantize: f(4), 0.0, 1.0, tf.quint8
tf.quantization.quantize_and_dequantize: f(4), 0.0, 1.0
tf.quantization.quantize_and_dequantize_v2: f(4), 0.0, 1.0
tf.train.latest_checkpoint: folder
tf.train.get_checkpoint_state: folder
tf.train.list_variables: checkpoint
tf.train.load_variable: checkpoint, "v/.ATTRIBUTES/VARIABLE_VALUE"
tf.summary.create_noop_writer:
tf.summary.should_record_summaries:
tf.summary.flush:
tf.summary.write: "tag", f(3), 5
tf.summary.record_if: bool(K)
tf.batch_to_space: f(4, 2, 2, 1), [2, 2], [[0, 0], [0, 0]]
tf.bitcast: f(3), tf.int32
tf.broadcast_dynamic_shape: t([3, 1]), t([1, 4 + K])
tf.broadcast_static_shape: tf.TensorShape([3, 1]), tf.TensorShape([1, 4])
tf.case: [(f() > 5.0, lambda: t(1)), (f() > K, lambda: t(2))], lambda: t(3)
tf.cond: f() > K, lambda: t(1.5), lambda: t(2.5)
tf.convert_to_tensor: [1, 2] if K else np.float32([1.5])
tf.conv: f(1, 8, 8, 2), f(3, 3, 2, 4), [1, 1, 1, 1], "SAME"
tf.dynamic_partition: f(4), w(4, high=2), 2
tf.extract_volume_patches: f(1, 4, 4, 4, 1), [1, 2, 2, 2, 1], [1, 2, 2, 2, 1], "VALID"
tf.foldl: lambda a, x: a * 0.5 + x, f(4)
tf.foldr: lambda a, x: a * 0.5 + x, f(4)
tf.histogram_fixed_width: f(20), [0.0, 1.0 + K]
tf.make_ndarray: tf.make_tensor_proto([1.5, 2.5 + K])
tf.map_fn: lambda x: tf.reduce_sum(x) * 2.0, f(3 + K, 2)
tf.numpy_function: lambda x: x * 2, [f(3 + K)], tf.float32
tf.py_function: lambda x: x.numpy() * 2, [f(3 + K)], tf.float32
tf.ragged_fill_empty_rows: t([0, 0, 2], tf.int64), f(3), t(4, tf.int64), 0.5
tf.ragged_fill_empty_rows_grad: t([0, 1, 3], tf.int64), f(4)
tf.random_index_shuffle: w(3), t([1, 2, 3], tf.uint32), t(9)
tf.reverse_sequence: f(2, 4), t([2, 3]), 1
tf.scan: lambda a, x: a * 0.5 + x, f(4)
tf.scatter_nd: t([[0], [2]]), f(2), [4]
tf.slice: f(3, 4), [1, 1], [2, 1 + K]
tf.space_to_batch_nd: f(1, 4, 4, 2), [2, 2], [[0, 0], [0, 0]]
tf.strided_slice: f(4, 4), [0, 1], [3, 4], [2, 1]
tf.switch_case: t(K), [lambda: t(1.5), lambda: t(2.5)]
tf.tensor_scatter_nd_add: f(4), t([[0], [2]]), f(2)
tf.tensor_scatter_nd_max: f(4), t([[0], [2]]), f(2)
tf.tensor_scatter_nd_min: f(4), t([[0], [2]]), f(2)
tf.tensor_scatter_nd_sub: f(4), t([[0], [2]]), f(2)
tf.tensor_scatter_nd_update: f(4), t([[0], [2]]), f(2)
tf.unravel_index: w(3, high=6), t([2, 3])
tf.vectorized_map: lambda x: tf.reduce_sum(x) * 2.0, f(3 + K, 2)
tf.while_loop: lambda n, x: n < 3, lambda n, x: (n + 1, x * 1.5), [t(0), f(2)]
tf.custom_gradient: lambda x: (x * 2.0, lambda up: up)
tf.grad_pass_through: lambda x: x * 2.0
tf.recompute_grad: lambda x: x * 2.0
tf.group: f(3), f(2)
tf.print: f(3 + K), output_stream="file://" + file
tf.map_fn: lambda x: x * 2.0, f(3 + K)
keras.ops.adaptive_average_pool: f(1, 8, 8, 2), 4
keras.ops.adaptive_max_pool: f(1, 8, 8, 2), 4
keras.ops.argpartition: f(6), 2
keras.ops.associative_scan: lambda a, b: a + b, f(4 + K)
keras.ops.batch_normalization: f(4, 3), f(3), f(3), -1
keras.ops.cond: f() > K, lambda: t(1.5), lambda: t(2.5)
keras.ops.conv: f(1, 8, 8, 2), f(3, 3, 2, 4)
keras.ops.conv_transpose: f(1, 4, 4, 2), f(3, 3, 3, 2), 2
keras.ops.convert_to_numpy: f(3 + K)
keras.ops.convert_to_tensor: [1.5, 2.5] if K else [3]
keras.ops.ctc_decode: f(2, 5, 4), t([5, 4])
keras.ops.ctc_loss: w(2, 3) + 1, f(2, 6, 5), t([3, 2]), t([6, 5])
keras.ops.custom_gradient: lambda x: (x * 2.0, lambda up: up)
keras.ops.depthwise_conv: f(1, 8, 8, 2), f(3, 3, 2, 2)
keras.ops.dot_product_attention: f(1, 4, 2, 3), f(1, 4, 2, 3), f(1, 4, 2, 3)
keras.ops.einsum: "ij,jk->ik", f(2, 3), f(3, 2)
keras.ops.extract_sequences: f(16), 4, 2 + K
keras.ops.fft2: (f(4, 4), f(4, 4))
keras.ops.ifft2: (f(4, 4), f(4, 4))
keras.ops.fold: f(1, 8, 9), (4, 4), 2
keras.ops.fori_loop: 0, 3 + K, lambda n, x: x * 1.5, f(2)
keras.ops.in_top_k: w(3), f(3, 4), 2
keras.ops.istft: (f(2, 5, 9), f(2, 5, 9)), 16, 4, 16
keras.ops.stft: f(2, 64), 16, 4, 16
keras.ops.jvp: lambda x: x * x, (f(3),), (f(3),)
keras.ops.kaiser: 5, 2.5 + K
keras.ops.map: lambda x: x * 2.0, f(3 + K)
keras.ops.multi_hot: w(2, 3), 4
keras.ops.pad: f(2, 3), [[1, 1], [0, 2]]
keras.ops.rearrange: f(2, 6), "a (b c) -> c b a", b=2
keras.ops.reshape: f(2, 6), (3, 4) if K else (12,)
keras.ops.scan: lambda a, x: (a + x, a * x), f(), f(4)
keras.ops.scatter: t([[0], [2]]), f(2), (4,)
keras.ops.scatter_update: f(4), t([[0], [2]]), f(2)
keras.ops.segment_sum: f(3, 2), t([0, 0, 1])
keras.ops.separable_conv: f(1, 8, 8, 2), f(3, 3, 2, 1), f(1, 1, 2, 4)
keras.ops.slice: f(3, 4), (1, 1), (2, 2)
keras.ops.slice_update: f(3, 4), (1, 1), f(2, 2)
keras.ops.sparse_categorical_crossentropy: w(3), f(3, 4)
keras.ops.switch: K, [lambda x: x + 1, lambda x: x * 2], f(3)
keras.ops.unfold: f(1, 4, 4, 2), 2
keras.ops.vectorize: lambda x: x * 2.0
keras.ops.vectorized_map: lambda x: x * 2.0, f(3 + K)
keras.ops.while_loop: lambda n, x: n < 3, lambda n, x: (n + 1, x * 1.5), (t(0), f(2))
keras.random.randint: (3,), 0, 9 + K, seed=4
keras.random.binomial: (3,), 4.0, 0.3, seed=4 + K
keras.activations.get: "relu" if K else None
keras.losses.get: "mse" if K else "huber"
keras.losses.ctc: w(2, 3) + 1, f(2, 6, 5)
keras.losses.sparse_categorical_crossentropy: w(3), f(3, 4)
keras.metrics.sparse_top_k_categorical_accuracy: w(3), f(3, 6)
keras.metrics.sparse_categorical_accuracy: w(3), f(3, 6)
"""

# What is not called: by the beginning of the name, with why.
LEFT_OUT = {
    "tf.debugging.enable_": "changes the process for all tests that come after",
    "tf.debugging.disable_": "changes the process for all tests that come after",
    "tf.debugging.set_log": "changes the process for all tests that come after",
    "tf.experimental.numpy.experimental_enable": "changes the process for all tests that come after",
    "tf.register_tensor_conversion_function": "changes the process for all tests that come after",
    "tf.no_gradient": "changes the process for all tests that come after",
    "tf.load_": "loads code",
    "tf.get_logger": "returns an object of the process",
    "tf.timestamp": "returns another value each time",
    "tf.random.get_global_generator": "returns an object of the process",
    "tf.import_graph_def": "works only while a graph is built",
    "tf.io.write_graph": "works only on a graph",
    "tf.variable_creator_scope": "takes and gives no tensors: a context manager",
    "tf.device": "takes and gives no tensors: a context manager",
    "tf.init_scope": "takes and gives no tensors: a context manager",
    "tf.control_dependencies": "takes and gives no tensors: a context manager",
    "tf.function": "makes a function; what those do has tests of its own",
    "tf.nondifferentiable_batch_function": "makes a function that waits for calls on other threads",
    "tf.io.decode_proto": "needs a protocol buffer type known to C++",
    "tf.io.encode_proto": "needs a protocol buffer type known to C++",
    "tf.io.decode_jxl": "TensorFlow cannot make such a picture",
    "tf.io.decode_webp": "TensorFlow cannot make such a picture",
    "tf.io.gfile.remove": "cannot be called twice on the same files",
    "tf.io.gfile.rename": "cannot be called twice on the same files",
    "tf.io.gfile.rmtree": "cannot be called twice on the same files",
    "tf.io.gfile.mkdir": "cannot be called twice on the same files",
    "tf.io.gfile.stat": "returns times",
    **dict.fromkeys((
        "tf.image.generate_bounding_box_proposals", "tf.signal.fftnd", "tf.signal.ifftnd", "tf.signal.rfftnd",
        "tf.signal.irfftnd", "tf.fftnd", "tf.ifftnd", "tf.rfftnd", "tf.irfftnd", "tf.math.approx_min_k",
        "tf.conv2d_backprop_filter_v2", "tf.conv2d_backprop_input_v2",
    ), "has no kernel for the CPU"),
    "tf.gradients": "works only while a graph is built",
    "tf.hessians": "works only while a graph is built",
    "tf.parallel_stack": "works only while a graph is built",
    "tf.experimental.numpy.around": "works only under numpy_behavior",
    "tf.experimental.numpy.round": "works only under numpy_behavior",
    "keras.metrics.get": "takes names, no tensors",
    "tf.check_pinned": "is for memory that devices share",
    "tf.summary.": "needs TensorBoard, or a writer, whose files have tests of their own",
    "tf.train.checkpoints_iterator": "waits for files",
    "tf.train.load_checkpoint": "returns a reader",
    "keras.activations.deserialize": "takes configurations, no tensors",
    "keras.losses.deserialize": "takes configurations, no tensors",
    "keras.metrics.deserialize": "takes configurations, no tensors",
}  # fmt: skip

FEATURES = {"n": tf.io.FixedLenFeature([1], tf.int64), "s": tf.io.VarLenFeature(tf.string)}
SEQUENCE = {"n": tf.io.FixedLenSequenceFeature([], tf.int64)}

# One white pixel.
GIF = (b"GIF89a\x01\x00\x01\x00\x80\x00\x00\xff\xff\xff\x00\x00\x00,\x00\x00\x00\x00"
       + b"\x01\x00\x01\x00\x00\x02\x02D\x01\x00;")  # fmt: skip
BMP = (b"BM:\x00\x00\x00\x00\x00\x00\x006\x00\x00\x00(\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x18\x00"
       + b"\x00" * 24 + b"\x01\x02\x03\x00")  # fmt: skip


class Maker(dict):
    """The names that the table is written in: drawn anew where they are used, for the first or the second kind `K`."""

    def __init__(self, kind: int) -> None:
        super().__init__(K=kind, tf=tf, np=np, keras=keras, t=tf.constant, f=self.f, w=self.w, c=self.c, s=self.s,
                         sp=self.sp, rg=self.rg, boxes=self.boxes, example=self.example, sequence=self.sequence,
                         FEATURES=FEATURES, SEQUENCE=SEQUENCE, gif=tf.constant(GIF), bmp=tf.constant(BMP))  # fmt: skip
        self.numbers = np.random.default_rng(kind)

    def __missing__(self, name: str) -> Any:
        if name not in ("file", "folder", "checkpoint", "png", "jpeg", "compressed"):
            raise KeyError(name)
        if name in ("png", "jpeg"):
            picture = tf.constant(self.numbers.integers(0, 255, (6, 6, 3)).astype(np.uint8))
            return (tf.io.encode_png if name == "png" else tf.io.encode_jpeg)(picture)
        if name == "compressed":
            import zlib

            return zlib.compress(b"abc" * (1 + self["K"]))
        folder = Path(tempfile.gettempdir()) / "public"
        file = folder / "read.txt"
        if not file.exists():
            (folder / "walked/in").mkdir(parents=True, exist_ok=True)
            file.write_text("text")
            tf.train.Checkpoint(v=tf.Variable(2.5)).save(str(folder / "saved"))
        return str({"file": file, "folder": folder, "checkpoint": folder / "saved-1"}[name])

    def f(self, *shape: int) -> tf.Tensor:
        return tf.constant(self.numbers.uniform(0.1, 0.9, shape), tf.float32)

    def w(self, *shape: int, high: int = 4, dtype: Any = np.int32) -> tf.Tensor:
        return tf.constant(self.numbers.integers(0, high, shape), dtype)

    def c(self, *shape: int) -> tf.Tensor:
        return tf.complex(self.f(*shape), self.f(*shape))

    def s(self, *words: str) -> tf.Tensor:
        return tf.constant(words)

    def sp(self, *shape: int) -> tf.SparseTensor:
        dense = self.numbers.uniform(0.5, 1.5, shape) * (self.numbers.uniform(size=shape) < 0.6)
        dense.flat[:3] = 1.25, 0.0, 2.5
        return tf.sparse.from_dense(tf.constant(dense, tf.float32)) if len(shape) > 1 else tf.SparseTensor(
            np.arange(shape[0])[:, None], self.f(*shape), [shape[0] + 1])  # fmt: skip

    def rg(self) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_lengths(self.f(4), [1, 0, 3] if self["K"] else [2, 2, 0])

    def boxes(self, *shape: int) -> tf.Tensor:
        corners = self.numbers.uniform(0.0, 0.4, (*shape, 2)), self.numbers.uniform(0.5, 1.0, (*shape, 2))
        return tf.constant(np.concatenate(corners, -1), tf.float32)

    def example(self, n: int) -> bytes:
        words = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"ab\0\0"] * n))
        number = tf.train.Feature(int64_list=tf.train.Int64List(value=[n]))
        return tf.train.Example(features=tf.train.Features(feature={"n": number, "s": words})).SerializeToString()

    def sequence(self, n: int) -> bytes:
        turns = [tf.train.Feature(int64_list=tf.train.Int64List(value=[k])) for k in range(n)]
        lists = tf.train.FeatureLists(feature_list={"n": tf.train.FeatureList(feature=turns)})
        return tf.train.SequenceExample(feature_lists=lists).SerializeToString()


def table() -> dict[str, str]:
    """Returns the calls by the name of their function."""
    lines = [line.partition(":") for line in CALLS.strip().splitlines()]
    return {name: text.strip() for name, _, text in lines}


def made(text: str, kind: int) -> CallArguments:
    """Returns the arguments of a line of the table, for the first or second kind of inputs."""
    return eval(f"(lambda *given, **named: (given, named))({text})", Maker(kind))


def why_left_out(name: str) -> str | None:
    """Returns why a function is not called; None if it is to be."""
    return next((reason for start, reason in LEFT_OUT.items() if name.startswith(start)), None)
