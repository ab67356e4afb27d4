/* A short convolution between two gates: see quire.kernels.shortconv. bias may be NULL; half: as of quire_gated. */
void quire_shortconv(const void *rows, const float *conv, const float *bias, const int32_t *starts,
                     const int32_t *lengths, const int32_t *slots, const int32_t *kept_at, const int32_t *kept,
                     void *columns, void *y, long sequences, long channels, long taps, long stride,
                     long columns_stride, int half, int threads) {
    ConvJob job = {.of = {starts, lengths, slots, kept_at, kept}, .times = rows,
                   .opened = element(rows, channels, half), .x = element(rows, 2 * channels, half), .conv = conv,
                   .bias = bias, .columns = columns, .result = y, .sequences = sequences, .channels = channels,
                   .taps = taps, .stride = stride, .columns_stride = columns_stride, .half = half};
    convolve_all(&job, threads);
}
