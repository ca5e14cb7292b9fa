-- Append what a command wrote to its output stream.
-- KEYS  1 prefix
-- ARGV  1 stream  2 stdout offset  3 stderr offset  4 stdout  5 stderr  6 keep bytes  7 ttl ms  8 anew 0|1
-- Returns {ok|ended|gone, "stdout offset,stderr offset" up to where the stream goes}
--@use output
local key = P .. 'out:' .. A[1]
local last, out, err = output_end(key)
if last == ENDED then return { 'ended', pair(out, err) } end
local to_out, to_err = A[2] + #A[4], A[3] + #A[5]
if not last and A[2] + A[3] > 0 and A[8] == '0' then return { 'gone', '0,0' } end
if #A[4] + #A[5] == 0 or to_out + to_err <= out + err then return { 'ok', pair(out, err) } end
local fields = { 'a', pair(A[2], A[3]) }
for i, name in ipairs({ 'o', 'e' }) do
  if A[3 + i] ~= '' then
    fields[#fields + 1] = name
    fields[#fields + 1] = A[3 + i]
  end
end
call('XADD', key, string.format('%.0f-1', to_out + to_err), unpack(fields))
call('XTRIM', key, 'MINID', string.format('%.0f', math.max(0, to_out + to_err - A[6])))
call('PEXPIRE', key, A[7])
return { 'ok', pair(to_out, to_err) }
