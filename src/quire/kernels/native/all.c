/* Every native kernel in one translation unit: reading the intrinsics' header takes longer than compiling them. */

#include "parallel.h"
#include "vectors.h"
#include "recording.h"
#include "tiles.h"

#include "../activation/native.c"
#include "../attention_cpu/rows.c"
#include "../attention_cpu/chunks.c"
#include "../attention_cpu/prompts.c"
#include "../delta/native.c"
#include "../heads/native.c"
#include "../linear/native.c"
#include "../linear/panels.c"
#include "../linear/panels_pack.c"
#include "../norm/native.c"
#include "../sums/native.c"
