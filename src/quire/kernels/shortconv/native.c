/* A short convolution between two gates: see quire.kernels.shortconv. bias may be NULL; half: as of quire_gated. */
void quire_shortconv(const StateRows *of, const void *rows, const float *conv, const float *bias, void *columns,
                     void *y, long channels, long taps, long stride, long columns_stride, int half, int threads) {
    ConvJob job = {.of = *of, .times = rows, .opened = element(rows, channels, half),
                   .x = element(rows, 2 * channels, half), .conv = conv, .bias = bias, .columns = columns, .result = y,
                   .channels = channels, .taps = taps, .stride = stride, .columns_stride = columns_stride,
                   .half = half};
    convolve_all(&job, threads);
    settle(of);
}
