-- Append what a command wrote to its output stream.
-- KEYS  1 prefix
-- ARGV  1 stream  2 stdout offset  3 stderr offset  4 stdout  5 stderr  6 keep bytes  7 ttl ms  8 leap 0|1
-- Returns {ok|ended|gone, "stdout offset,stderr offset" up to where the stream goes}
--@use output
local key = P .. 'out:' .. A[1]
local last, out, err = output_end(key)
if last == ENDED then return { 'ended', pair(out, err) } end
local at_out, at_err = tonumber(A[2]), tonumber(A[3])
local to_out, to_err = at_out + #A[4], at_err + #A[5]
if A[8] == '0' and (at_out > out or at_err > err) then return { last and 'ok' or 'gone', pair(out, err) } end
if to_out + to_err <= out + err then return { 'ok', pair(out, err) } end
local fields = { 'a', pair(at_out, at_err) }
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
