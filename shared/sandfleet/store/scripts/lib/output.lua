-- What a command writes while it runs: stream `out:{id}`. An entry's id is how many bytes of both streams there are with
-- it, so that what is pushed twice is refused; fields `a` "stdout offset,stderr offset" where it begins, `o`, `e` bytes.
local ENDED, OUTPUT_KEPT, CALL_OUTPUT_KEPT = '9007199254740991-1', 3600000, 60000

-- The last entry's id, and up to where it goes; nil if there is none.
local function output_end(key)
  local last = call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if not last then return nil, 0, 0 end
  local entry = {}
  for i = 1, #last[2], 2 do entry[last[2][i]] = last[2][i + 1] end
  local out, err = string.match(entry.a, '^(%d+),(%d+)$')
  return last[1], tonumber(out) + #(entry.o or ''), tonumber(err) + #(entry.e or '')
end

-- Two numbers as text; up to 15 digits each, which `..` would round.
local function pair(out, err)
  return string.format('%.0f,%.0f', out, err)
end

-- The last entry of all; one that is there stays as it is. Who called for a result has it: of that not much is kept.
local function end_output(stream, outcome, job)
  if stream == '' then return end
  local key = P .. 'out:' .. stream
  local last, out, err = output_end(key)
  if last == ENDED then return end
  call('XADD', key, ENDED, 'a', pair(out, err), 'end', outcome)
  call('PEXPIRE', key, job and OUTPUT_KEPT or CALL_OUTPUT_KEPT)
end
